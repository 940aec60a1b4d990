"""Clouds as a whole: `makara down` has nothing be left of what a home's manager rented."""

"""Clouds as a whole: `makara up` starts a manager on a VM of its own, `makara down` has nothing be left."""

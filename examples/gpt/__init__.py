"""The example job that `makara demo` trains, a package so that an installation holds its files."""

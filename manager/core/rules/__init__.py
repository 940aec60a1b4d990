"""The rules, each about one matter: what is missing or wrong, and the facts and commands that mend it."""

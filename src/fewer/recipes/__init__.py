"""Recipes: the tables of papers as files. `fewer reproduce --list` shows them, `fewer reproduce NAME` runs one."""

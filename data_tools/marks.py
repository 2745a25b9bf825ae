"""Marks in a rendered conversation: code points that Unicode gives to no character, so that no text has them."""

BEGIN, END = "\ufdd0", "\ufdd1"  # around what a {% generation %} block renders
BREAK = "\ufdd2"  # inside a name that is text

"""The verbs of the command line; the other packages import nothing from here."""

"""The command line: what is asked, checked and handed to the packages that do it."""

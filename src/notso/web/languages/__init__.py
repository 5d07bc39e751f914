"""The languages of the pages: a table of words for each, and which one a reader is answered in."""

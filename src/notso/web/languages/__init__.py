"""Languages of the pages: a table of words for each language, and selection of a reader's language."""

"""One file for each format. A reader makes an Index of a path; a writer makes an OutFile of an Index."""

"""Value types shared with the layers above, which import only the standard library."""

"""Value types shared with the layers above; standard library only."""

"""What all the programs' APIs have in common."""

"""Values that cross the border to the floors above: the standard library only."""

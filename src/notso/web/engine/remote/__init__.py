"""An engine that another server runs, as a front end has it."""

"""Where conversations live. No SQL exists outside this package."""

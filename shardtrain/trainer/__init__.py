"""From a `Run` to its parts and through the loop."""

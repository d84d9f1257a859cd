"""Is it right: the demo learns, our losses equal TRL's, and planted faults are caught."""

"""Progress, schedules, metrics, seed and device."""

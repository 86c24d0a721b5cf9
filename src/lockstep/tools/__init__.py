"""Tools that inspect, measure and predict trainings. The core and training/ import none of them."""

"""What a model needs in memory, and what renting costs against buying: pure functions of figures."""

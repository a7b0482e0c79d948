"""Pictures, as pure functions from answers of the API to options of ECharts and the words for them."""

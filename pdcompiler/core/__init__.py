"""The words: what every pass and backend speaks of; imports nothing above itself."""

"""The plan of a run: what is asked (`ask`), the account of its stages (`stages`), placements (`placements`), which one
to take and where that changes (`advice`), and all of it as plain data (`as_json`)."""

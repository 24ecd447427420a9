"""Sizes as people read them."""


def of_bytes(size: float) -> str:
  """In the unit that leaves the fewest digits before the point; one digit behind it where there would be less than three."""
  value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
  while round(value) >= 1024 and len(units) > 1:
    value, units = value / 1024, units[1:]
  return f"{value:.0f} B" if units[0] == "B" else f"{value:.{0 if value >= 99.95 else 1}f} {units[0]}"

"""`makara calibrate`: measures here or fetches from a manager, then prints, draws and writes."""

"""The parts that every step passes: phases, intake, exchange, update, gate."""

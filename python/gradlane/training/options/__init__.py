"""Settings of sessions: options, the rules they follow, which tensor gets which codec."""

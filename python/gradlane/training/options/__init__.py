"""Options of sessions: fields, groups, rules, codecs by tensor."""

-- The trainer went back to version `to`: everything after it is generated again. undo.lua does the rest.
-- KEYS: base, job. ARGV: to.
rewind(KEYS[1], KEYS[2], tonumber(ARGV[1]))

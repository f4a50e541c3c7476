-- The trainer went back to version `to`: everything after it is to be generated again.
-- KEYS: base, job. ARGV: to. Answers how many prompts wait to be issued again.
rewind(KEYS[1], KEYS[2], tonumber(ARGV[1]))
return redis.call('ZCARD', KEYS[1] .. ':waiting')

-- The trainer went back to version `to`: what came after it is generated again. undo.lua does the rest.
-- KEYS: base, job. ARGV: to, prompts whose complete groups stay ... Answers how many groups stay, and how many do not.
local kept = {}
for i = 2, #ARGV do kept[ARGV[i]] = true end
return {rewind(KEYS[1], KEYS[2], tonumber(ARGV[1]), kept)}

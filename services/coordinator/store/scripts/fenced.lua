-- Commands one after the other, all at once. ARGV: for each command the number of its parts, then these.
-- Answers the answer to each.
local answers, i = {}, 1
while i <= #ARGV do
  local last = i + tonumber(ARGV[i])
  answers[#answers + 1] = redis.call(unpack(ARGV, i + 1, last))
  i = last + 1
end
return answers

-- peek: how many jobs wait in each class of a partition, so that a worker claims where there are some.
--
-- KEYS    as claim's: pairs of `:front` stream, stream; then the model's bell
-- ARGV[3] most jobs to count in each pair
-- Returns {now, next due time (-1: none), streams whose group was gone, last entry id of each KEY, jobs
--         per pair, keys that are not ours as claim says them}
-- If it never runs: nothing changed but that jobs which have come due are in their queues.
--
-- What is counted may be gone, stale or at a limit by the time it is claimed: a claim decides.

taker.now = now_ms()
local most = tonumber(ARGV[3])

local function last_delivered(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err and not string.find(groups.err, 'no such key', 1, true) then error(groups) end
  for _, group in ipairs(groups) do
    local about = {}
    for i = 1, #group, 2 do about[group[i]] = group[i + 1] end
    if about.name == GROUP then return about['last-delivered-id'] end
  end
  redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  taker.regrouped = taker.regrouped + 1
  return '0-0'
end

local function undelivered(stream)
  return #redis.call('XRANGE', stream, '(' .. last_delivered(stream), '+', 'COUNT', most)
end

local function waiting(front, queue)
  local class = class_of(queue)
  if redis.call('SISMEMBER', P .. ':paused', class) == 1 then return 0 end
  local found = undelivered(front) + undelivered(queue)
  for _, tenant in ipairs(redis.call('ZRANGE', P .. ':turns:' .. class, 0, 63)) do
    if tenant ~= '*' then found = found + redis.call('ZCARD', tenant_key(tenant, 'q:' .. class)) end
  end
  return math.min(found, most)
end

local next_due, counts = promote_due(), {}
for i = 1, #KEYS - 1, 2 do
  local front, queue = KEYS[i], KEYS[i + 1]
  counts[#counts + 1] = guarded(taker.foreign, kinds_of(front, queue), waiting, front, queue) or 0
end
return { taker.now, next_due, taker.regrouped, last_entries(KEYS), counts, taker.foreign }

-- peek: how many jobs wait in each class of a partition, so that a worker claims where there are some.
--
-- KEYS    as claim's: pairs of `:front` stream, stream; then the model's bell
-- ARGV[3] most jobs to count in each pair
-- Returns {now, next due time (-1: none), streams whose group was gone, last entry id of each KEY, jobs
--         per pair, keys that are not ours as claim says them}
-- If it never runs: nothing changed but that jobs which have come due are in their queues, and that
--         tenants of whom nothing waits any more (cancelled, expired) have left the line for turns.
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

-- Jobs in the backlogs of the tenants in line; more of the line is read until `enough` are found.
local function held_back(class, enough)
  local turns, found, at = P .. ':turns:' .. class, 0, 0
  while found < enough do
    local tenants = redis.call('ZRANGE', turns, at, at + 63)
    if #tenants == 0 then break end
    for _, tenant in ipairs(tenants) do
      local waits = tenant == '*' and 0 or redis.call('ZCARD', tenant_key(tenant, 'q:' .. class))
      if waits > 0 or tenant == '*' then
        found, at = found + waits, at + 1
      else
        redis.call('ZREM', turns, tenant)
        redis.call('SREM', P .. ':backlogs:' .. class, tenant)
      end
    end
  end
  return found
end

local function waiting(front, queue)
  local class = class_of(queue)
  if redis.call('SISMEMBER', P .. ':paused', class) == 1 then return 0 end
  local found = undelivered(front) + undelivered(queue)
  return math.min(found + held_back(class, most - found), most)
end

local next_due, counts = promote_due(), {}
for i = 1, #KEYS - 1, 2 do
  local front, queue = KEYS[i], KEYS[i + 1]
  counts[#counts + 1] = guarded(taker.foreign, kinds_of(front, queue), waiting, front, queue) or 0
end
return { taker.now, next_due, taker.regrouped, last_entries(KEYS), counts, taker.foreign }

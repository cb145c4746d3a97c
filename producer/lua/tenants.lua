-- Put in front of every script: tenants with limits, who of theirs runs and waits, and their turns.
--
-- Their waiting jobs stand in a backlog of each tenant's own, and tenants take turns (taking.lua). Who
-- runs and who waits is kept as sets of job ids, changed with the job's state by the same script: an id
-- is in the set of its state or in none, however often that is said. Without limits nothing is kept.

-- The part of a queue's name that models and priorities make: `<model>:<priority>`.
local function class_of(queue) return string.sub(queue, #P + 4) end

-- Wakes the workers of a model that wait for something to do. Queues wake them by themselves; this is
-- for what becomes claimable without a new entry in one.
local function ring(class)
  redis.call('XADD', P .. ':bell:' .. string.match(class, '^(.*):[^:]*$'), 'MAXLEN', 1, '*', 'r', 1)
end

local limited, limits = nil, {}

-- {running = , waiting = } with nil where there is no limit; nil for a tenant without limits.
local function limits_of(tenant)
  if limited == nil then limited = redis.call('EXISTS', P .. ':limits') == 1 end
  if not limited or not tenant then return nil end
  if limits[tenant] == nil then
    local found = redis.call('HMGET', P .. ':limits', tenant, '*')
    local text = found[1] or found[2]
    local running, waiting = string.match(text or '', '^(%d*) (%d*)$')
    limits[tenant] = text and { running = tonumber(running), waiting = tonumber(waiting) } or false
  end
  return limits[tenant] or nil
end

local function tenant_key(tenant, name) return P .. ':tenant:' .. tenant .. ':' .. name end

local function is_backlog(stream)
  return stream ~= nil and string.sub(stream, 1, #P + 8) == P .. ':tenant:'
end

-- True while the tenant may have one more job in this state.
local function has_room(tenant, state)
  local most = (limits_of(tenant) or {})[state]
  if not most then return true end
  local set = tenant_key(tenant, state)
  if redis.call('SCARD', set) < most then return true end
  local id = redis.call('SRANDMEMBER', set) -- one whose hash was lost is found here, sooner or later
  if not id or redis.call('HGET', job_key(id), 'state') == state then return false end
  redis.call('SREM', set, id)
  return redis.call('SCARD', set) < most
end

-- Puts one at the end of the line for turns, unless it stands there. `*` stands for the queue itself.
local function line_up(class, tenant)
  local turns = P .. ':turns:' .. class
  local last = redis.call('ZRANGE', turns, -1, -1, 'WITHSCORES')[2]
  redis.call('ZADD', turns, 'NX', (tonumber(last) or 0) + 1, tenant)
end

-- The tenant takes turns in a class while it has room, and is parked until it has.
local function take_turns(tenant, class)
  if has_room(tenant, 'running') then
    redis.call('SREM', tenant_key(tenant, 'parked'), class)
    line_up(class, tenant)
    ring(class)
  else
    redis.call('SADD', tenant_key(tenant, 'parked'), class)
  end
end

-- Tells where a limited tenant's job is now: running, waiting, or (any other state) gone.
local function account(id, tenant, state)
  if not limits_of(tenant) then return end
  local left = 0
  for _, name in ipairs({ 'running', 'waiting' }) do
    local moved = redis.call(name == state and 'SADD' or 'SREM', tenant_key(tenant, name), id)
    if name == 'running' and state ~= 'running' then left = moved end
  end
  if left == 1 then
    for _, class in ipairs(redis.call('SMEMBERS', tenant_key(tenant, 'parked'))) do
      take_turns(tenant, class)
    end
  end
end

-- Puts a job into its tenant's backlog: where one submitted at `since` stands, or else at the end.
-- Returns the backlog's key for the hash.
local function hold_back(id, tenant, class, now, since)
  local backlog = tenant_key(tenant, 'q:' .. class)
  local score = since
  if not score then -- jobs of one millisecond keep their order
    local last = redis.call('ZRANGE', backlog, -1, -1, 'WITHSCORES')[2]
    score = math.max(now, last and tonumber(last) + 1 / 1024 or 0)
  end
  redis.call('ZADD', backlog, string.format('%.4f', score), id)
  redis.call('SADD', P .. ':backlogs:' .. class, tenant)
  take_turns(tenant, class)
  return backlog
end

local RATE_MS = 30000 -- the drain rate is that of about this long

-- What is left now of a count kept at another time. A clock that was set back makes none larger.
local function faded(count, at, now)
  return tonumber(count or 0) * math.exp(math.min(tonumber(at or now) - now, 0) / RATE_MS)
end

-- Measures how fast a limited tenant's jobs end: a count in which each end fades with time.
local function drained(tenant, now)
  if not limits_of(tenant) then return end
  local key = tenant_key(tenant, 'drain')
  local drain = fields(key, 'count', 'at', 'since')
  local count = faded(drain.count, drain.at, now) + 1
  redis.call('HSET', key, 'count', count, 'at', now, 'since', drain.since or now)
  redis.call('PEXPIRE', key, 20 * RATE_MS)
end

-- How long until `wanted` places of the tenant come free at that rate, in ms; 5 s where none is known.
local function retry_after(tenant, wanted, now)
  local drain = fields(tenant_key(tenant, 'drain'), 'count', 'at', 'since')
  if not drain.count then return 5000 end
  local count = faded(drain.count, drain.at, now)
  local age = math.max(1000, now - tonumber(drain.since))
  local each_ms = RATE_MS * (1 - math.exp(-age / RATE_MS)) / math.max(count, 0.001)
  return math.floor(math.min(math.max(wanted * each_ms, 100), 60000))
end

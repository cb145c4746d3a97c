-- Put in front of every script: the moves that several scripts share.
--
-- Every script: ARGV[1] is the partition's prefix `{namespace:p}`, ARGV[2] the command that
-- announces events (PUBLISH, or SPUBLISH on a cluster). Keys that are found while a script runs are
-- built from the prefix, so they lie in the slot of KEYS[1]. Time is always the server's.

local P, ANNOUNCE = ARGV[1], ARGV[2]
local GROUP = 'workers'
local DEAD_TTL_MS = 7 * 86400 * 1000
local GRACE_MS = 400 -- a subscriber that reconnects within this is not taken for gone

local function job_key(id) return P .. ':j:' .. id end
local function log_key(id) return P .. ':e:' .. id end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The named fields of a hash, as a table; absent ones are nil.
local function fields(key, ...)
  local names = { ... }
  local values = redis.call('HMGET', key, unpack(names))
  local found = {}
  for i, name in ipairs(names) do found[name] = values[i] or nil end
  return found
end

-- Appends one entry to the event log and announces it as `<entry before> <entry> <payload>`: a
-- subscriber that does not stand at `entry before` knows that it missed something.
-- Returns the entry's id and how many subscribers heard it.
local function append(id, last, wish, payload)
  local log = log_key(id)
  local entry = redis.call('XADD', log, wish, 'd', payload)
  return entry, redis.call(ANNOUNCE, log, (last or '0-0') .. ' ' .. entry .. ' ' .. payload)
end

-- True when this very text without a token is in the log already: an earlier try wrote it.
local function has_text(id, offset, payload)
  for _, entry in ipairs(redis.call('XRANGE', log_key(id), offset .. '-1', tostring(offset))) do
    if entry[2][2] == payload then return true end
  end
  return false
end

-- Appends events that start at `start`, without those that an earlier try of the same call has
-- logged. `events` is a flat list: offset after the event, payload, ...
-- Returns the offset now, the last entry and the fewest hearers; nil when the log does not reach
-- `start`, reaches beyond the events, or ends inside one: nothing was written then.
local function append_events(id, job, start, events)
  local logged, last, heard = tonumber(job.offset), job.last, nil
  if logged < start then return nil end
  for i = 1, #events, 2 do
    local after, payload, wish = tonumber(events[i]), events[i + 1], nil
    if after > logged then
      if start < logged then return nil end
      wish = after .. '-0'
    elseif after == logged and start == after and not has_text(id, after, payload) then
      wish = after .. '-*'
    end
    if wish then
      local count
      last, count = append(id, last, wish, payload)
      heard, logged = math.min(heard or count, count), after
    end
    start = after
  end
  if start < logged then return nil end
  return logged, last, heard
end

local function hearers(id)
  local kind = ANNOUNCE == 'SPUBLISH' and 'SHARDNUMSUB' or 'NUMSUB'
  return tonumber(redis.call('PUBSUB', kind, log_key(id))[2])
end

-- True when the job is to end with its subscribers, has had one, and has none.
local function abandoned(id, job)
  return job.on_disconnect == 'cancel' and job.watched and hearers(id) == 0
end

-- The part of a queue's name that models and priorities make: `<model>:<priority>`.
local function class_of(queue) return string.sub(queue, #P + 4) end

-- Wakes the workers of a model that wait for something to do. Queues wake them by themselves; this is
-- for what becomes claimable without a new entry in one.
local function ring(class)
  redis.call('XADD', P .. ':bell:' .. string.match(class, '^(.*):[^:]*$'), 'MAXLEN', 1, '*', 'r', 1)
end

-- Tenants with limits. Their waiting jobs stand in a backlog of each tenant's own, and tenants take
-- turns (claim). Who runs and who waits is kept as sets of job ids, changed with the job's state by
-- the same script: an id is in the set of its state or in none, however often that is said.

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

-- Measures how fast a limited tenant's jobs end: a count in which each end fades with time.
local function drained(tenant, now)
  if not limits_of(tenant) then return end
  local key = tenant_key(tenant, 'drain')
  local drain = fields(key, 'count', 'at', 'since')
  local at = tonumber(drain.at or now)
  local count = tonumber(drain.count or 0) * math.exp((at - now) / RATE_MS) + 1
  redis.call('HSET', key, 'count', count, 'at', now, 'since', drain.since or now)
  redis.call('PEXPIRE', key, 20 * RATE_MS)
end

-- How long until `wanted` places of the tenant come free at that rate, in ms; 5 s where none is known.
local function retry_after(tenant, wanted, now)
  local drain = fields(tenant_key(tenant, 'drain'), 'count', 'at', 'since')
  if not drain.count then return 5000 end
  local count = tonumber(drain.count) * math.exp((tonumber(drain.at) - now) / RATE_MS)
  local age = math.max(1000, now - tonumber(drain.since))
  local each_ms = RATE_MS * (1 - math.exp(-age / RATE_MS)) / math.max(count, 0.001)
  return math.floor(math.min(math.max(wanted * each_ms, 100), 60000))
end

-- Takes an entry out of its queue, whoever holds it.
local function unqueue(stream, entry)
  if stream and stream ~= '' then
    redis.pcall('XACK', stream, GROUP, entry)
    redis.call('XDEL', stream, entry)
  end
end

-- True when the entry that the hash names is in its queue, and is this job's (a stream made anew may
-- give an old id to another job).
local function queued(id, job)
  if is_backlog(job.stream) then return redis.call('ZSCORE', job.stream, id) ~= false end
  local found = redis.call('XRANGE', job.stream, job.entry, job.entry)[1]
  return found ~= nil and found[2][2] == id
end

-- Puts a job at the end of a queue; the hash names the entry.
local function enqueue(id, stream)
  local entry = redis.call('XADD', stream, '*', 'j', id)
  redis.call('HSET', job_key(id), 'state', 'waiting', 'stream', stream, 'entry', entry)
  redis.call('HDEL', job_key(id), 'owner', 'claimed', 'due')
end

-- Lets a job wait where its class and tenant belong; `front`: before those that came after it. Needs
-- model, priority, tenant, submitted.
local function place(id, job, front, now)
  local class = job.model .. ':' .. job.priority
  if limits_of(job.tenant) then
    local backlog = hold_back(id, job.tenant, class, now, front and tonumber(job.submitted))
    redis.call('HSET', job_key(id), 'state', 'waiting', 'stream', backlog)
    redis.call('HDEL', job_key(id), 'owner', 'claimed', 'due', 'entry')
  else
    enqueue(id, P .. ':q:' .. class .. (front and ':front' or ''))
  end
  account(id, job.tenant, 'waiting')
end

-- A terminal event where the log ends, packed as Event.pack does.
local function last_event(job, reason, code, message)
  local event = { v = 1, offset = tonumber(job.offset), attempt = tonumber(job.attempt), final = true }
  event.finish_reason = reason
  if code then event.error = { code, message } end
  return cmsgpack.pack(event)
end

-- Makes a state final: hash, log, indexes, TTLs. The terminal event must be in the log already.
-- `job` needs idem, model, tenant, stream. A failed job keeps its request, for a replay from the dead
-- letter.
local function close(id, job, state, now, result_ttl, log_ttl)
  local key, ttl = job_key(id), tonumber(result_ttl)
  if is_backlog(job.stream) then redis.call('ZREM', job.stream, id) end
  account(id, job.tenant, state)
  drained(job.tenant, now)
  redis.call('HSET', key, 'state', state, 'ended', now)
  redis.call('HDEL', key, 'owner', 'stream', 'entry', 'due', 'alone')
  if state ~= 'failed' then redis.call('HDEL', key, 'request') end
  for _, index in ipairs({ 'live:' .. job.model, 'deadline', 'delay' }) do
    redis.call('ZREM', P .. ':' .. index, id)
  end
  redis.call('PEXPIRE', key, ttl)
  redis.call('PEXPIRE', log_key(id), log_ttl)
  if job.idem then redis.call('PEXPIRE', job.idem, ttl) end
end

-- Ends a job on behalf of whoever asked: terminal event, then close. Needs model, tenant, attempt,
-- offset, last, idem, stream.
local function end_job(id, job, state, now, result_ttl, log_ttl, code, message)
  local payload = last_event(job, state == 'failed' and 'error' or state, code, message)
  local entry = append(id, job.last, job.offset .. '-*', payload)
  redis.call('HSET', job_key(id), 'last', entry)
  if code then redis.call('HSET', job_key(id), 'error_code', code, 'error_message', message) end
  close(id, job, state, now, result_ttl, log_ttl)
end

-- Keeps a failed job for a look and a replay.
local function bury(id, now)
  redis.call('ZADD', P .. ':dead', now, id)
  redis.call('PEXPIRE', job_key(id), DEAD_TTL_MS)
end

-- One more failure. Tokens logged since the last one mean that the job itself is not the cause.
local function count_failure(id, job)
  local failures, offset = tonumber(job.failures), tonumber(job.offset)
  if offset > tonumber(job.mark or '0') then failures = 0 end
  redis.call('HSET', job_key(id), 'failures', failures + 1, 'mark', offset)
  return failures + 1
end

local function past(deadline, now) return deadline and deadline ~= '0' and tonumber(deadline) <= now end

-- A job that its worker hands back, or lost: to the front of its class, or to the end that was asked
-- for. It must be out of its queue already. Needs what place and end_job need, cancel and deadline.
local function put_back(id, job, now, result_ttl, log_ttl)
  if job.cancel or past(job.deadline, now) then
    end_job(id, job, job.cancel and 'cancelled' or 'expired', now, result_ttl, log_ttl)
  else
    place(id, job, true, now)
  end
end

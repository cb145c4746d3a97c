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
  local found = redis.call('XRANGE', job.stream, job.entry, job.entry)[1]
  return found ~= nil and found[2][2] == id
end

-- Puts a job at the end of a queue; the hash names the entry.
local function enqueue(id, stream)
  local entry = redis.call('XADD', stream, '*', 'j', id)
  redis.call('HSET', job_key(id), 'state', 'waiting', 'stream', stream, 'entry', entry)
  redis.call('HDEL', job_key(id), 'owner', 'claimed', 'due')
end

local function queue_of(job) return P .. ':q:' .. job.model .. ':' .. job.priority end

-- A terminal event where the log ends, packed as Event.pack does.
local function last_event(job, reason, code, message)
  local event = { v = 1, offset = tonumber(job.offset), attempt = tonumber(job.attempt), final = true }
  event.finish_reason = reason
  if code then event.error = { code, message } end
  return cmsgpack.pack(event)
end

-- Makes a state final: hash, log, indexes, TTLs. The terminal event must be in the log already.
-- `job` needs idem. A failed job keeps its request, for a replay from the dead letter.
local function close(id, job, state, now, result_ttl, log_ttl)
  local key, ttl = job_key(id), tonumber(result_ttl)
  redis.call('HSET', key, 'state', state, 'ended', now)
  redis.call('HDEL', key, 'owner', 'stream', 'entry', 'due', 'alone')
  if state ~= 'failed' then redis.call('HDEL', key, 'request') end
  for _, index in ipairs({ 'live', 'deadline', 'delay' }) do redis.call('ZREM', P .. ':' .. index, id) end
  redis.call('PEXPIRE', key, ttl)
  redis.call('PEXPIRE', log_key(id), log_ttl)
  if job.idem then redis.call('PEXPIRE', job.idem, ttl) end
end

-- Ends a job on behalf of whoever asked: terminal event, then close. Needs model, priority,
-- attempt, offset, last, idem, stream, entry.
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
-- for. It must be out of its queue already.
local function put_back(id, job, now, result_ttl, log_ttl)
  if job.cancel or past(job.deadline, now) then
    end_job(id, job, job.cancel and 'cancelled' or 'expired', now, result_ttl, log_ttl)
  else
    enqueue(id, queue_of(job) .. ':front')
  end
end

-- Put in front of every script, with tenants.lua and moves.lua behind it: what all of them are written in.
--
-- Every script: ARGV[1] is the partition's prefix `{namespace:p}`, ARGV[2] the command that
-- announces events (PUBLISH, or SPUBLISH on a cluster). Keys that are found while a script runs are
-- built from the prefix, so they lie in the slot of KEYS[1]. Time is always the server's.

local P, ANNOUNCE = ARGV[1], ARGV[2]
local GROUP = 'workers'
local DEAD_TTL_MS = 7 * 86400 * 1000
local GRACE_MS = 800 -- a subscriber that reconnects within this is not taken for gone; a slot is free within a second

local PARTITION = string.match(P, ':(%d+)}$')
local UUID7 = '^%x%x%x%x%x%x%x%x%-%x%x%x%x%-7%x%x%x%-[89ab]%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x%.(%d+)$'

-- True of an id of a job of this partition: `<uuid7>.<p>`, in small letters. Whoever reads it finds the keys by it.
local function is_job_id(id)
  return string.match(id, UUID7) == PARTITION and not string.find(id, '%u')
end

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

-- Tells those who listen to a channel; returns how many there are. Of a user that may reach no channel
-- (Redis 7 makes new ones so) nobody is told, and all is written the same: the log is the truth.
local function announce(channel, message)
  local heard = redis.pcall(ANNOUNCE, channel, message)
  return type(heard) == 'number' and heard or 1
end

-- Appends one entry to the event log and announces it as `<entry before> <entry> <payload>`: a
-- subscriber that does not stand at `entry before` knows that it missed something.
-- Returns the entry's id and how many subscribers heard it.
local function append(id, last, wish, payload)
  local log = log_key(id)
  local entry = redis.call('XADD', log, wish, 'd', payload)
  return entry, announce(log, (last or '0-0') .. ' ' .. entry .. ' ' .. payload)
end

-- True when this very text without a token is in the log already: an earlier try wrote it.
local function has_text(id, offset, payload)
  for _, entry in ipairs(redis.call('XRANGE', log_key(id), offset .. '-1', tostring(offset))) do
    if entry[2][2] == payload then return true end
  end
  return false
end

-- Appends events, without those that an earlier try of the same call has logged. `events` is a flat
-- list, from `first` on: the offset that they start at, then for each its payload and the offset after it;
-- or nothing.
-- Returns the offset now, the last entry and the fewest hearers; nil when the log does not reach
-- their start, reaches beyond the events, or ends inside one: nothing was written then.
local function append_events(id, job, events, first)
  local logged, last, heard = tonumber(job.offset), job.last, nil
  local start = tonumber(events[first]) or logged
  if logged < start then return nil end
  for i = first + 1, #events, 2 do
    local payload, after, wish = events[i], tonumber(events[i + 1]), nil
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

-- True when the job is to end with its subscribers, has had one, and has none; `heard`: how many heard
-- an event that was announced just now, where one was.
local function abandoned(id, job, heard)
  return job.on_disconnect == 'cancel' and job.watched and (heard or hearers(id)) == 0
end

-- The same for so long that they are not about to reconnect (Redis may just have come back). Needs alone.
local function forsaken(id, job, now, heard)
  if not abandoned(id, job, heard) then
    if job.alone then redis.call('HDEL', job_key(id), 'alone') end
    return false
  end
  local since = tonumber(job.alone or now)
  if not job.alone or since > now then -- a clock that was set back begins anew
    redis.call('HSET', job_key(id), 'alone', now)
  end
  return now - since >= GRACE_MS
end

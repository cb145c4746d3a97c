-- phantoms: release what this worker holds in the queues but does not know: claims whose reply was lost.
--
-- KEYS    queue streams (`:front` ones too)
-- ARGV[3] worker, ARGV[4] result TTL ms, ARGV[5] log TTL ms, then the ids of the jobs it knows
-- Returns the ids released (or ended, as cancel or the deadline asked).
-- If it never runs: the leases run out, which costs each job a failure.
-- To be called only while no claim is in flight.

local known, released, now = {}, {}, now_ms()
for i = 6, #ARGV do known[ARGV[i]] = true end

local function examine(stream, entry)
  local found = redis.call('XRANGE', stream, entry, entry)[1]
  local id = found and found[2][2] or ''
  if known[id] then return end
  local job = fields(job_key(id), 'state', 'owner', 'stream', 'entry', 'model', 'priority', 'cancel',
    'deadline', 'attempt', 'offset', 'last', 'idem', 'tenant', 'submitted')
  unqueue(stream, entry)
  if job.state == 'running' and job.owner == ARGV[3] and job.stream == stream and job.entry == entry then
    put_back(id, job, now, ARGV[4], ARGV[5])
    released[#released + 1] = id
  end
end

for _, stream in ipairs(KEYS) do
  local from = '-'
  while true do
    local page = redis.pcall('XPENDING', stream, GROUP, from, '+', 100, ARGV[3])
    if page.err or #page == 0 then break end
    for _, pending in ipairs(page) do
      guarded({}, function() return { stream, 'stream' } end, examine, stream, pending[1])
      from = '(' .. pending[1]
    end
  end
end
return released

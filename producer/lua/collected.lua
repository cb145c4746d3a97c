-- collected: the results and logs of these jobs are with the one who asked for them, and need not be kept
-- for as long as others are.
--
-- KEYS     job hashes and event logs, of jobs that have ended
-- ARGV[3]  how long they are still kept, in ms; one that goes sooner stays at that
-- Returns  how many are kept shorter now.
-- If it never runs: they go when their own time is over.

local count = 0
for _, key in ipairs(KEYS) do count = count + redis.call('PEXPIRE', key, ARGV[3], 'LT') end
return count

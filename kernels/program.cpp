// Runs recorded calls one after the other; see recording.py.
#include "vec.h"

struct Call {
    void (*function)(const void* arguments);
    const void* arguments;
};

// Each field is 8 bytes wide, in the order in which recording.py packs them.
struct ProgramArguments {
    const Call* calls;
    int64_t count;
};

EXPORT void tf_run(const ProgramArguments* program) {
    for (int64_t i = 0; i < program->count; i++) program->calls[i].function(program->calls[i].arguments);
}

// Four vectors as one number: each operation is made on all four before the next one.
//
// A long formula is a chain in which each step waits for the one before. Four chains in step with each other leave
// a CPU's window of waiting instructions free for what else there is to do.
#pragma once

#include "vec.h"

namespace tf {

struct Four {
    f32x16 v[4];
};

template <typename F> INLINE Four each(const Four& x, F f) { return {{f(x.v[0]), f(x.v[1]), f(x.v[2]), f(x.v[3])}}; }
template <typename F> INLINE Four each(const Four& x, const Four& y, F f) {
    return {{f(x.v[0], y.v[0]), f(x.v[1], y.v[1]), f(x.v[2], y.v[2]), f(x.v[3], y.v[3])}};
}

INLINE Four operator+(const Four& x, const Four& y) { return each(x, y, [](f32x16 a, f32x16 b) INLINE_LAMBDA { return a + b; }); }
INLINE Four operator*(const Four& x, const Four& y) { return each(x, y, [](f32x16 a, f32x16 b) INLINE_LAMBDA { return a * b; }); }
INLINE Four operator+(const Four& x, float y) { return each(x, [=](f32x16 a) INLINE_LAMBDA { return a + y; }); }
INLINE Four operator+(float x, const Four& y) { return y + x; }
INLINE Four operator-(float x, const Four& y) { return each(y, [=](f32x16 a) INLINE_LAMBDA { return x - a; }); }
INLINE Four operator*(const Four& x, float y) { return each(x, [=](f32x16 a) INLINE_LAMBDA { return a * y; }); }

}  // namespace tf

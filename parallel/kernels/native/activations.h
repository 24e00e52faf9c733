// The nonlinear functions of MLPs.

#pragma once

#include <type_traits>

#include "vector.h"

namespace weft {

enum class Activation : int32_t { SILU, GELU_TANH, GELU, RELU };  // as structures.py numbers them

// Calls `work` with an activation as a constant.
template <class Work>
void with_activation(Activation activation, const Work& work) {
    switch (activation) {
        case Activation::SILU:
            return work(std::integral_constant<Activation, Activation::SILU>{});
        case Activation::GELU_TANH:
            return work(std::integral_constant<Activation, Activation::GELU_TANH>{});
        case Activation::GELU:
            return work(std::integral_constant<Activation, Activation::GELU>{});
        case Activation::RELU:
            return work(std::integral_constant<Activation, Activation::RELU>{});
    }
}

// What the sigmoid of GELU by tanh is of, arXiv:1606.08415: 0.5 (1 + tanh y) is the sigmoid of 2 y.
inline Floats of_gelu_tanh(const Floats& x) { return x * multiply_add(x * x, 2 * 0.7978845608f * 0.044715f, 2 * 0.7978845608f); }

// The part of the normal distribution beyond x, not below 0: e^(-x^2 / 2) times a polynomial of 1 / (1 + 0.3 x), to 2e-7 of it where
// the first factor is as fine.
template <class T>
inline Floats normal_tail(const Floats& x) {
    const Floats t = 1.0f / multiply_add(x, 0.3f, 1.0f);
    Floats p = multiply_add(t, 0.03568299f, -0.15723726f);
    p = multiply_add(p, t, 0.20641227f);
    p = multiply_add(p, t, -0.05373758f);
    p = multiply_add(p, t, 0.12859005f);
    p = multiply_add(p, t, 0.09990492f);
    p = multiply_add(p, t, 0.12075532f);
    p = multiply_add(p, t, 0.11962921f);
    return exponential_from<T>(x * x, -0.5f, 0.0f) * (p * t);
}

// Of LANES values, as finely as T asks for.
template <Activation ACTIVATION, class T>
inline Floats activated(const Floats& x) {
    switch (ACTIVATION) {
        case Activation::SILU:
            return silu<T>(x);
        case Activation::GELU_TANH:
            return times_sigmoid<T>(x, of_gelu_tanh(x));
        case Activation::GELU: {
            const Floats tail = normal_tail<T>(bit_cast<Floats>(bit_cast<Ints>(x) & INT32_MAX));
            return x * choose(x < 0.0f, tail, 1.0f - tail);
        }
        case Activation::RELU:
            return choose(x < 0.0f, Floats{}, x);
    }
}

}  // namespace weft

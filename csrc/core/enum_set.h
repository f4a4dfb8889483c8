// A set of an enum's values: the members of a description that a kernel reads.
#pragma once
#include <initializer_list>

namespace ftbert {

template <class Enum>
struct EnumSet {
  unsigned bits = 0;

  constexpr EnumSet() = default;
  constexpr EnumSet(std::initializer_list<Enum> values) {
    for (const Enum value : values) add(value);
  }
  bool operator==(const EnumSet&) const = default;
  constexpr void add(Enum value, bool there = true) { bits |= there ? bit(value) : 0u; }
  constexpr bool has(Enum value) const { return (bits & bit(value)) != 0; }
  constexpr bool has_all(EnumSet others) const { return (others.bits & ~bits) == 0; }
  constexpr EnumSet without(EnumSet others) const {
    EnumSet rest;
    rest.bits = bits & ~others.bits;
    return rest;
  }
  static constexpr unsigned bit(Enum value) { return 1u << static_cast<unsigned>(value); }
};

}  // namespace ftbert

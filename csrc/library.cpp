// What the library says of itself: the loader compares it with what Python expects.

#include "arguments.h"

#define TEXT_(x) #x
#define NAMED(name) " " TEXT_(name)

extern "C" __attribute__((visibility("default"))) const char* regard_fields() { return FIELDS(NAMED); }

extern "C" __attribute__((visibility("default"))) const int64_t* regard_sizes() {
  static const int64_t sizes[] = {TILE, CHUNK, BLOCK, GROUP, BAND, PAD};
  return sizes;
}

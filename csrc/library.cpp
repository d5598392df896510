// What the library says of itself: the loader compares it with what Python expects.

#include "arguments.h"
#include "records.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define TEXT_(x) #x
#define NAMED(name) " " TEXT_(name)
#define ROWS_NAMED(name) NAMED(name) NAMED(name##_b) NAMED(name##_h) NAMED(name##_l)
#define NORM_NAMED(name) NAMED(name) NAMED(name##_bias)
#define LINEAR_NAMED(name) NAMED(name) NAMED(name##_scales) NAMED(name##_bias)

EXPORTED const char* regard_fields() { return FIELDS(NAMED); }

EXPORTED const char* regard_records() {
#define OWN(name) NAMED(own_##name)
#define OTHER(name) NAMED(other_##name)
#define TABLE_NAMED(name) name##_TABLE
#define own_TABLE TABLE_FIELDS(OWN)
#define other_TABLE TABLE_FIELDS(OTHER)
  return "recurrence" RECURRENCE_FIELDS(NAMED, ROWS_NAMED)
      "\nlines" LINES_FIELDS(NAMED, NAMED, NAMED, NAMED)
      "\nselection" SELECTION_FIELDS(NAMED)
      "\nlayer" LAYER_FIELDS(NORM_NAMED, LINEAR_NAMED, NAMED)
      "\nstack" STACK_FIELDS(NAMED, TABLE_NAMED, NORM_NAMED);
}

EXPORTED const int64_t* regard_sizes() {
  static const int64_t sizes[] = {TILE, CHUNK, BLOCK, BLOCKS, GROUP, BAND, PAD, SPAN};
  return sizes;
}

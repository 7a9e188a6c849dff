/* End of what vectors.h defines for one instruction set. */

#undef floats
#undef ints
#undef words
#undef halves
#undef LANE_PAIRS
#undef LANE_FOURS

#include "llama-h2o.h"

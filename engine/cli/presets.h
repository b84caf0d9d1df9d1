/* engine/cli/presets.h - shapes of models that `tinyloop synth` can make, as the config.json that such a model has. */
#ifndef TL_PRESETS_H
#define TL_PRESETS_H

#include "arch_bind.h"

struct tl_preset {
    const char *name, *about;
    const struct tl_arch *arch;
    const char *config;
};

const struct tl_preset *tl_preset_find(const char *name); /* NULL if there is none */
const struct tl_preset *tl_preset_at(int i);              /* NULL past the last */

#endif

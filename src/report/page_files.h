// The page's style and script, as the build found them in page.css and page.js.
#pragma once

namespace weft::report {

extern const char* const kPageStyle;
extern const char* const kPageScript;

}  // namespace weft::report

"""Policy sets in the form of other libraries; each module needs the library that it is named after."""

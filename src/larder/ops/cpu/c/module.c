/* Empty module, so that installing and importing find the library like any extension. */

#define Py_LIMITED_API 0x030b0000
#include <Python.h>

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_c", "C kernels, called through ctypes.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__c(void) { return PyModule_Create(&definition); }

// Stubs for the driver functions that ggml's memory pool calls. The CUDA backend is an auxiliary filter for the driver library
// (--auxiliary): with a driver, the loader resolves these functions there. Without one the backend loads with these stubs, which
// are never called, because there is no device.

static int no_device(void) {
    return 100; // CUDA_ERROR_NO_DEVICE
}

#define MISSING (void) __attribute__((alias("no_device")))

int cuDeviceGet MISSING, cuDeviceGetAttribute MISSING, cuGetErrorString MISSING;
int cuMemAddressFree MISSING, cuMemAddressReserve MISSING, cuMemCreate MISSING, cuMemGetAllocationGranularity MISSING;
int cuMemMap MISSING, cuMemRelease MISSING, cuMemSetAccess MISSING, cuMemUnmap MISSING;

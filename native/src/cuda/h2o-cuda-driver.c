// What ggml's growing pool of memory calls of the driver's library. The CUDA backend is an auxiliary filter for that library
// (--auxiliary): the loader takes these functions from it where there is a driver. Where there is none the backend loads with
// those below, which are never called: it has no device.

static int no_device(void) {
    return 100; // CUDA_ERROR_NO_DEVICE
}

#define MISSING (void) __attribute__((alias("no_device")))

int cuDeviceGet MISSING, cuDeviceGetAttribute MISSING, cuGetErrorString MISSING;
int cuMemAddressFree MISSING, cuMemAddressReserve MISSING, cuMemCreate MISSING, cuMemGetAllocationGranularity MISSING;
int cuMemMap MISSING, cuMemRelease MISSING, cuMemSetAccess MISSING, cuMemUnmap MISSING;

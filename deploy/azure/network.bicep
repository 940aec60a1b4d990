// The workers' network, with a way out and none in, a subnet for the manager's VM, and the three identities.

param name string
param region string
param managerFrom string

resource address 'Microsoft.Network/publicIPAddresses@2024-01-01' = {
  name: '${name}-way-out'
  location: region
  sku: { name: 'Standard' }
  properties: { publicIPAllocationMethod: 'Static' }
}

resource gateway 'Microsoft.Network/natGateways@2024-01-01' = {
  name: '${name}-way-out'
  location: region
  sku: { name: 'Standard' }
  properties: {
    publicIpAddresses: [{ id: address.id }]
  }
}

// Azure's own rules are enough: VMs of the network reach each other, and nobody from outside reaches them.
resource securityGroup 'Microsoft.Network/networkSecurityGroups@2024-01-01' = {
  name: '${name}-workers'
  location: region
  properties: { securityRules: [] }
}

// Of the VM of `makara up`: VMs of the network reach it by Azure's own rules, people by this one.
resource managerGroup 'Microsoft.Network/networkSecurityGroups@2024-01-01' = {
  name: '${name}-manager'
  location: region
  properties: {
    securityRules: empty(managerFrom) ? [] : [
      {
        name: 'people'
        properties: {
          priority: 100
          direction: 'Inbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: managerFrom
          sourcePortRange: '*'
          destinationAddressPrefix: '*'
          destinationPortRange: '8700'
        }
      }
    ]
  }
}

resource network 'Microsoft.Network/virtualNetworks@2024-01-01' = {
  name: name
  location: region
  properties: {
    addressSpace: { addressPrefixes: ['10.77.0.0/16'] }
    subnets: [
      {
        name: 'workers'
        properties: {
          addressPrefix: '10.77.0.0/20'
          defaultOutboundAccess: false
          natGateway: { id: gateway.id }
          networkSecurityGroup: { id: securityGroup.id }
        }
      }
      {
        name: 'manager'
        properties: {
          addressPrefix: '10.77.16.0/28'
          defaultOutboundAccess: false
          natGateway: { id: gateway.id }
          networkSecurityGroup: { id: managerGroup.id }
        }
      }
    ]
  }
}

resource manager 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${name}-manager'
  location: region
}

resource worker 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${name}-worker'
  location: region
}

// As whom trainers write checkpoints: users' code can have its tokens, so it is none that may delete VMs.
resource store 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${name}-store'
  location: region
}

output subnetId string = '${network.id}/subnets/workers'
output securityGroupId string = securityGroup.id
output managerSubnetId string = '${network.id}/subnets/manager'
output managerSecurityGroupId string = managerGroup.id
output managerIdentityId string = manager.id
output managerPrincipal string = manager.properties.principalId
output workerIdentityId string = worker.id
output workerPrincipal string = worker.properties.principalId
output storeIdentityId string = store.id
output storePrincipal string = store.properties.principalId
